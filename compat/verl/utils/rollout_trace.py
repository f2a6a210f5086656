"""Calls of an agent loop, sent to weave, mlflow or trackio once `RolloutTraceConfig.init` names one of them.

Without a backend nothing is sent; samples/ of a run has every response.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_enabled: ContextVar[bool] = ContextVar("traced", default=True)
_attributes: ContextVar[dict[str, Any] | None] = ContextVar("attributes", default=None)


class RolloutTraceConfig:
    """Where calls are sent: one for the whole process, set by `init` and forgotten by `reset`."""

    _instance: ClassVar[RolloutTraceConfig | None] = None
    _initialized = False
    backend: str | None = None
    client: Any = None
    token2text = False
    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    def __new__(cls) -> RolloutTraceConfig:
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        return cls()

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Names the backend; a second call changes nothing."""
        config = cls()
        if config._initialized:
            return
        config.project_name, config.experiment_name = project_name, experiment_name
        config.backend, config.token2text = backend, token2text
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker
        config.client = _client(backend, project_name, experiment_name)
        config._initialized = True

    @classmethod
    def get_backend(cls) -> str | None:
        return cls().backend

    @classmethod
    def get_client(cls) -> Any:
        return cls().client

    @classmethod
    def enable_token2text(cls) -> bool:
        return cls().token2text

    @classmethod
    def reset(cls) -> None:
        cls._instance = None


def _client(backend: str | None, project: str, experiment: str) -> Any:
    if backend == "weave":
        import weave  # pyright: ignore[reportMissingImports]

        return weave.init(project)
    if backend == "mlflow":
        import mlflow  # pyright: ignore[reportMissingImports]

        mlflow.config.enable_async_logging()
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db"))
        mlflow.set_experiment(project)
        return mlflow
    if backend == "trackio":
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio import context_vars  # pyright: ignore[reportMissingImports]

        if context_vars.current_run.get() is None:
            trackio.init(project=project, name=experiment, config={"framework": "verl"})
        return trackio
    return None


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """What the calls inside belong to. `trace=False` sends none of them."""
    config = RolloutTraceConfig()
    if not trace:
        token = _enabled.set(False)
        try:
            yield
        finally:
            _enabled.reset(token)
        return
    if not config.backend:
        yield
        return
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes = {key: value for key, value in given.items() if value is not None}
    attributes |= {"validate": validate, "experiment_name": config.experiment_name}
    token = _attributes.set(attributes)
    try:
        with _backend_span(config.backend, name, attributes):
            yield
    finally:
        _attributes.reset(token)


@contextmanager
def _backend_span(backend: str, name: str, attributes: dict[str, Any]) -> Iterator[None]:
    """The backend's own context around all calls of one conversation."""
    if backend == "mlflow":
        import mlflow  # pyright: ignore[reportMissingImports]

        with mlflow.start_span(name=name) as span:
            for key, value in attributes.items():
                mlflow.set_trace_tag(span.trace_id, str(key), str(value))
            yield
        return
    if backend == "weave":
        import weave  # pyright: ignore[reportMissingImports]

        with weave.attributes(attributes):
            yield
        return
    with nullcontext():
        yield


def rollout_trace_op(function: Function) -> Function:
    """Decorator of a method or a coroutine: its arguments and its result are sent to the backend, if there is one."""
    signature = inspect.signature(function)

    def opened(instance: Any, args: Any, kwargs: Any) -> Any:
        if not _enabled.get() or not RolloutTraceConfig.get_backend():
            return None
        bound = signature.bind(instance, *args, **kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        del inputs[next(iter(inputs))]  # the instance
        return _sent(function.__qualname__, inputs, instance)

    @functools.wraps(function)
    async def traced_coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = opened(self, args, kwargs)
        if call is None:
            return await function(self, *args, **kwargs)
        with call as finish:
            return finish(await function(self, *args, **kwargs), with_text=True)

    @functools.wraps(function)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = opened(self, args, kwargs)
        if call is None:
            return function(self, *args, **kwargs)
        with call as finish:
            return finish(function(self, *args, **kwargs))

    return traced_coroutine if inspect.iscoroutinefunction(function) else traced  # pyright: ignore


@contextmanager
def _sent(name: str, inputs: dict[str, Any], instance: Any) -> Iterator[Callable[..., Any]]:
    """A call at the backend: `finish(result)` tells its result and gives it back; an error is told and raised."""
    config = RolloutTraceConfig()
    told: list[Any] = []

    def finish(result: Any, *, with_text: bool = False) -> Any:
        told.append(_decoded(instance, inputs, result) if with_text and config.token2text else result)
        return result

    if config.backend == "mlflow":
        import mlflow  # pyright: ignore[reportMissingImports]

        with mlflow.start_span(name=name) as span:
            span.set_inputs(inputs)
            yield finish
            span.set_outputs(told[0])
        return
    if config.backend not in ("weave", "trackio"):
        yield finish
        return
    call = _weave_call(name, inputs) if config.backend == "weave" else None
    try:
        yield finish
    except Exception as error:
        if call is not None:
            config.client.finish_call(call, exception=error)
        else:
            _log_trackio(name, inputs, error=error)
        raise
    if call is not None:
        config.client.finish_call(call, output=told[0])
    else:
        _log_trackio(name, inputs, output=told[0])


def _weave_call(name: str, inputs: dict[str, Any]) -> Any:
    from weave.trace.context import call_context  # pyright: ignore[reportMissingImports]

    attributes = {**call_context.call_attributes.get()}
    return RolloutTraceConfig.get_client().create_call(op=name, inputs=inputs, attributes=attributes)


def _log_trackio(name: str, inputs: dict[str, Any], output: Any = None, error: Exception | None = None) -> None:
    config, attributes = RolloutTraceConfig(), _attributes.get() or {}
    messages = [dict(one) for one in inputs.get("messages") or [] if isinstance(one, dict) and "role" in one]
    rest = {key: value for key, value in inputs.items() if key != "messages"}
    metadata = {"op": name, "backend": "trackio", "experiment_name": config.experiment_name, "inputs": _plain(rest)}
    metadata |= _plain(attributes)
    if error is None:
        fields = _fields(output)
        metadata |= {"status": "success", "output": _plain(output if fields is None else fields)}
        text = (fields or {}).get("response_text") or (fields or {}).get("answer") or json.dumps(_plain(output))
    else:
        metadata |= {"status": "error", "exception_type": type(error).__name__}
        text = json.dumps({"exception_type": type(error).__name__, "exception": str(error)})
    messages = messages or [{"role": "user", "content": json.dumps(_plain(rest))}]
    trace = config.client.Trace(messages=[*messages, {"role": "assistant", "content": str(text)}], metadata=metadata)
    key = "rollout_trace/" + "".join(one if one.isalnum() or one in "._-" else "_" for one in name)
    step = attributes.get("step")
    config.client.log({key: trace}, step=None if step is None else int(step))


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    return json.loads(json.dumps(value, default=str))


def _fields(output: Any) -> dict[str, Any] | None:
    """The fields of an output; None if it has none."""
    if isinstance(output, dict):
        return dict(output)
    if is_dataclass(output) and not isinstance(output, type):
        return asdict(output)
    dump = getattr(output, "model_dump", None)
    return dump() if callable(dump) else dict(vars(output)) if hasattr(output, "__dict__") else None  # pyright: ignore


def _decoded(instance: Any, inputs: dict[str, Any], output: Any) -> Any:
    """The output with its tokens as text beside them."""
    decode, fields = getattr(getattr(instance, "tokenizer", None), "decode", None), _fields(output)
    if not callable(decode) or fields is None:
        return output
    prompt, response = fields.get("prompt_ids", inputs.get("prompt_ids")), fields.get("response_ids")
    found = {"prompt_text": prompt, "response_text": fields.get("token_ids") if response is None else response}
    texts = {name: decode(ids) for name, ids in found.items() if ids is not None}
    return fields | texts if texts else output
