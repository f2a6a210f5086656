"""One end of the channel between the tests and a program: sends requests and answers, and translates objects.

Plain data travels as its content, and so do tables of pandas. Other objects stay where they are and travel as a number,
for which the other end has a stand-in. A list, a dictionary, a set or a table exists on both sides under one number:
every message begins with what its sender has changed in them. Nothing is ever unpickled, and no code travels.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from typing import Any

from posttrain.sandbox import table_reader, tables
from posttrain.sandbox.objects import (
    OPERATIONS,
    Tasks,
    describe,
    form_of,
    importable,
    known_class,
    known_interface,
    make_signature,
)
from posttrain.sandbox.stand_ins import (
    ARITHMETIC,
    COMPARISONS,
    FunctionStandIn,
    StandInType,
    coroutine_of,
    form_of_stand_in,
    generator_of,
    is_stand_in,
    locate,
    new_stand_in,
    stand_in_class,
)
from posttrain.sandbox.wire import (
    MUTABLE,
    WatchedContainer,
    assign,
    decode,
    empty_container,
    encode,
    encode_content,
    plain_base,
)

_WATCHED = 256
# Before each message, only the containers mentioned last are searched for changes, at most _WATCHED of them. One with
# more than _LARGE members is searched once after each mention: comparing a long list would slow every message.
_LARGE = 1000
_CONSTANTS = {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}


class NotTransferable(TypeError):
    """An object that cannot be handed to the other side."""


class _Default(defaultdict[Any, Any]):
    """A defaultdict of the other side, which creates missing members there."""

    def __init__(self, peer: Peer, number: int) -> None:
        super().__init__()
        self._place = peer, number

    def __missing__(self, key: Any) -> Any:
        peer, number = self._place
        return peer.ask("item", number, (key,))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Peer:
    """Sends requests to the other side, and serves its requests."""

    def __init__(self, sign: int) -> None:
        # `sign` is 1 for one end and -1 for the other, so that their numbers differ.
        self._sign = sign
        self._turn = threading.RLock()  # one exchange at a time among the threads of this process
        self._own_objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._remote_objects: dict[int, Any] = {}
        self._remote_numbers: dict[int, int] = {}
        self._watched: OrderedDict[int, WatchedContainer] = OrderedDict()
        self._fresh: list[int] = []
        self._late_changes: list[Any] = []
        self._known: dict[type, type] = {}
        self._methods: dict[tuple[int, Any], Any] = {}
        self._in_context = False
        self._tasks = Tasks()

    # Messages; each end defines how to send and receive them.

    def _send(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _receive(self) -> dict[str, Any]:
        raise NotImplementedError

    def ask(self, operation: str, target: Any, args: Any = (), options: Any = None, *, may_stop: bool = False) -> Any:
        """Return the value that the other side gives, or raise the exception that it raised."""
        with self._turn:
            return self._answer(self._exchange(operation, target, args, options or {}), may_stop)

    def _exchange(self, operation: str, target: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
        # The other side may send requests of its own before it answers; these are served first.
        self._post({"do": operation, "of": target}, lambda: self._arguments(args, options))
        while "do" in (message := self._next()):
            self._serve(message)
        return message

    def _arguments(self, args: Any, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "args": [self.write(arg) for arg in args],
            "options": {name: self.write(one) for name, one in options.items()},
        }

    def _post(self, message: dict[str, Any], content: Callable[[], dict[str, Any]]) -> None:
        # If the message cannot be encoded, nothing of it counts as sent.
        with self._turn:
            self._fresh.clear()
            try:
                changes, self._late_changes = self._changes(), []
                message = {**message, **content()}
                message["changes"] = changes + self._late_changes
            except BaseException:
                for key in self._fresh:
                    self._watched.pop(key, None)  # so that it is sent with its content the next time
                raise
            self._send(message)

    def _next(self) -> dict[str, Any]:
        message = self._receive()
        for owner, number, content in message.get("changes", []):
            self._apply_change(owner, number, content)
        return message

    def _answer(self, message: dict[str, Any], may_stop: bool) -> Any:
        if "error" in message:
            raise self.exception(message["error"])
        return self.read(message["value"])

    def _serve(self, request: dict[str, Any]) -> None:
        try:
            if request["do"] == "describe":
                description = describe(self._target(request["of"]), self._class_reference)
                self._post({}, lambda: {"value": description})
                return
            value = self._perform(request)
            self._post({}, lambda: {"value": self.write(value)})
        except BaseException as error:
            raised = error
            self._post({}, lambda: {"error": self.error(raised)})

    def _perform(self, request: dict[str, Any]) -> Any:
        operation, target = request["do"], self._target(request["of"])
        args = [self.read(arg) for arg in request.get("args", [])]
        options = {name: self.read(value) for name, value in request.get("options", {}).items()}
        if operation in ("step", "finish", "cancel"):
            return getattr(self._tasks, operation)(*args)
        if operation == "start":
            return self._tasks.start(target)
        return OPERATIONS[operation](target, *args, **options)

    def _target(self, target: Any) -> Any:
        return self._own_objects[target] if target is not None else None

    # Requests that stand-ins make.

    def get(self, stand_in: Any, name: str) -> Any:
        return self.ask("get", locate(stand_in)[1], (name,))

    def put(self, stand_in: Any, name: str, value: Any) -> None:
        self.ask("put", locate(stand_in)[1], (name, value))

    def call(self, stand_in: Any, args: Any, options: dict[str, Any]) -> Any:
        return self.ask("call", locate(stand_in)[1], args, options)

    def construct(self, kind: Any, args: Any, options: dict[str, Any]) -> Any:
        return self.ask("call", locate(kind)[1], args, options)

    def derive(self, name: str, bases: tuple[type, ...], space: dict[str, Any], options: dict[str, Any]) -> type:
        raise TypeError(f"{name} cannot inherit from a class of the other process")

    def special(self, stand_in: Any, name: str, args: Any, options: dict[str, Any]) -> Any:
        if isinstance(stand_in, StandInType):
            return self._ask_special(stand_in, name, args, options)
        if name == "__iter__" and form_of_stand_in(stand_in) == "generator":
            return stand_in  # the other side would return our own generator that wraps it
        base = plain_base(type(stand_in))
        if base is not None and hasattr(base, name) and not self.trusts_value(stand_in):
            return getattr(base, name)(stand_in, *args, **options)
        return self._ask_special(stand_in, name, args, options)

    def _ask_special(self, stand_in: Any, name: str, args: Any, options: dict[str, Any]) -> Any:
        if name in ("__exit__", "__aexit__"):
            args = (*args[:2], None)  # a traceback holds the frames of this process
        try:
            return self.ask("special", locate(stand_in)[1], (name, *args), options, may_stop=name == "__next__")
        except NotTransferable:
            if name in COMPARISONS or name in ARITHMETIC:
                return NotImplemented
            raise

    def waits(self, stand_in: Any) -> Generator[Any, Any, Any]:
        """What `await` does with an awaitable of the other side."""
        task = self.ask("start", locate(stand_in)[1])
        try:
            while not self.ask("step", None, (task,)):
                yield
        except BaseException:  # this end was cancelled
            self.ask("cancel", None, (task,))
            raise
        return self.ask("finish", None, (task,), may_stop=True)

    def signature(self, stand_in: Any) -> Any:
        """The arguments of a function of the other side, for `inspect.signature`."""
        return make_signature(self.ask("signature", locate(stand_in)[1]))

    def is_instance(self, kind: Any, instance: Any) -> bool:
        """Whether a class of the other side says that an object is one of its own."""
        return is_stand_in(instance) and self.ask("is_instance", locate(kind)[1], (instance,)) is True

    def trusts_value(self, stand_in: Any) -> bool:
        """Whether an object that inherits from plain data may answer with its own methods."""
        return True

    # Encoding.

    def write(self, value: Any) -> Any:
        return encode(value, self._refer, self._refer_held, self._refer_shared)

    def _refer(self, value: Any) -> Any:
        if is_stand_in(value):
            return {"yours": locate(value)[1]}
        if tables.can_be_sent(value):
            return self._write_table(value)
        if id(value) in self._remote_numbers:
            return {"yours": self._remote_numbers[id(value)]}
        for name, constant in _CONSTANTS.items():
            if value is constant:
                return {"constant": name}
        return self._export(value)

    def _export(self, value: Any) -> Any:
        form = form_of(value)
        if form == "class":
            return {"mine": {"form": "class", **self._class_reference(value)}}
        if form == "method" and getattr(value, "__self__", None) is not None:
            # Each `handler.notify` is another object. They are equal, so both must be one to the other side.
            function = getattr(value, "__func__", None)
            value = self._methods.setdefault((id(value.__self__), id(function) if function else value.__name__), value)
        reference: dict[str, Any] = {"id": self.register(value), "form": form}
        if form == "exception":
            reference |= {
                "args": [self._write_or_repr(one) for one in value.args],
                "cause": self.write(value.__cause__),
                "context": self._write_context(value),
                "suppress": value.__suppress_context__,
            }
            # Only of Python's own: attributes of others are asked for, and what is sent here would not be read there.
            fields = vars(value) if type(value).__module__ == "builtins" else {}
            reference["fields"] = {
                key: self.write(one) for key, one in fields.items() if isinstance(key, str) and key != "__notes__"
            }
        if "function" not in form and form != "method":
            reference["of"] = self._class_reference(type(value))
        return {"mine": reference}

    def _write_context(self, error: BaseException) -> Any:
        # Only of the exception itself: a chain of contexts may be as long as the stack.
        if error.__context__ is None or error.__cause__ is not None or self._in_context:
            return None
        self._in_context = True
        try:
            return self.write(error.__context__)
        except NotTransferable:
            return None
        finally:
            self._in_context = False

    def _write_or_repr(self, value: Any) -> Any:
        try:
            return self.write(value)
        except NotTransferable:
            return repr(value)

    def _refer_held(self, value: Any, content: Callable[[], Any]) -> Any:
        if is_stand_in(value):
            return {"yours": locate(value)[1]}
        if tables.can_be_sent(value):  # a Timestamp is a datetime
            return self._write_table(value)
        number = self.register(value)
        reference = {"id": number, "form": "object", "of": self._class_reference(type(value))}
        if isinstance(value, MUTABLE):
            if id(value) in self._watched:
                return {"mine": reference}
            self._watch(value, True, number)
        return {"mine": {**reference, "holds": content()}}

    def _write_table(self, value: Any) -> Any:
        def content() -> Any:
            return tables.write(value, self.write)

        return self._refer_shared(value, content) if tables.is_changeable(value) else content()

    def _refer_shared(self, value: Any, content: Callable[[], Any]) -> Any:
        if id(value) in self._remote_numbers:
            number = self._remote_numbers[id(value)]
            if id(value) not in self._watched:
                self._watch(value, False, number)
                self._late_changes.append(["yours", number, content()])
            return {"yours": number}
        number = self.register(value)
        if id(value) in self._watched:
            return {"mine": {"id": number}}
        self._watch(value, True, number)
        return {"mine": {"id": number, "holds": content()}}

    def register(self, value: Any) -> int:
        """Return the number of an object of this side. It stays registered as long as the channel exists."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._sign * (len(self._own_objects) + 1)
            self._own_objects[number] = value
        return number

    def _class_reference(self, kind: type) -> dict[str, Any]:
        if is_stand_in(kind):
            return {"yours": locate(kind)[1]}
        return {"id": self.register(kind), "known": importable(kind)}

    def _watch(self, container: Any, mine: bool, number: int) -> None:
        self._watched[id(container)] = WatchedContainer(container, mine, number)
        self._fresh.append(id(container))
        if len(self._watched) > _WATCHED:
            self._watched.popitem(last=False)

    def _changes(self) -> list[Any]:
        found = [one for one in list(self._watched.values()) if one.changed()]
        for key in [key for key, one in self._watched.items() if len(one.before) > _LARGE]:
            del self._watched[key]
        return [
            ["mine" if one.mine else "yours", one.number, encode_content(one.container, self.write)] for one in found
        ]

    def error(self, error: BaseException) -> dict[str, Any]:
        described = describe_error(error)
        try:
            return {**described, "exception": self.write(error)}
        except Exception:
            return described

    # Decoding.

    def read(self, data: Any) -> Any:
        return decode(data, self._special)

    def _special(self, tag: str, content: Any) -> Any:
        if tag == "yours":
            return self._own_objects[content]
        if tag == "mine":
            return self._read_theirs(content)
        if tag == "constant":
            return _CONSTANTS[content]
        if tag == "table":
            return table_reader.read(content, self.read)
        raise ValueError(f"unknown tag {tag!r}")

    def _read_theirs(self, reference: dict[str, Any]) -> Any:
        form = reference.get("form", "container")
        if form == "class":
            return self._read_class(reference)
        number = _number(reference["id"])
        found = self._remote_objects.get(number)
        if form == "container":
            return self._read_container(number, found, reference)
        if found is None:
            found = self._remote_objects[number] = self._stand_in(number, form, reference)
        elif "holds" in reference and isinstance(found, MUTABLE):
            assign(found, self.read(reference["holds"]))
        return found

    def _read_container(self, number: int, found: Any, reference: dict[str, Any]) -> Any:
        if "holds" not in reference:
            if found is None:
                raise ValueError("a container without content")
            return found
        if found is None:
            holds = reference["holds"]
            default = isinstance(holds, dict) and "default" in holds
            found = _Default(self, number) if default else empty_container(holds)
            self._remote_objects[number] = found
            self._remote_numbers[id(found)] = number
        assign(found, self.read(reference["holds"]))
        self._watch(found, False, number)
        return found

    def _apply_change(self, owner: str, number: int, content: Any) -> None:
        container = self._own_objects[number] if owner == "yours" else self._remote_objects[number]
        assign(container, self.read(content))
        if id(container) in self._watched:
            self._watched[id(container)].changed()

    def _stand_in(self, number: int, form: str, reference: dict[str, Any]) -> Any:
        place = (self, number)
        if form.endswith("function") or form == "method":
            return new_stand_in(FunctionStandIn, place, form)
        kind: Any = self._read_class(reference["of"])
        if form == "exception":
            return self._read_exception(kind, place, reference)
        if type(kind) is not StandInType:
            kind = self._class_over(kind)
        if form == "object" and plain_base(kind) is not None:
            found = new_stand_in(kind, place, form, self.read(reference["holds"]))
            if isinstance(found, MUTABLE):
                self._watch(found, False, number)
            return found
        found = new_stand_in(kind, place, form)
        if form in ("generator", "coroutine"):
            # A real generator or coroutine, because tests check for that.
            found = generator_of(found) if form == "generator" else coroutine_of(found)
            self._remote_numbers[id(found)] = number
        return found

    def _read_class(self, reference: dict[str, Any]) -> type:
        if "yours" in reference:
            return self._own_objects[reference["yours"]]
        known = known_class(reference.get("known"))
        if known is not None:
            return known
        number = _number(reference["id"])
        if number not in self._remote_objects:
            description = self._exchange("describe", number, (), {})["value"]
            bases = tuple(self._read_class(base) for base in description["bases"])
            self._remote_objects[number] = stand_in_class(
                self, number, description["name"], bases, description, self._class_space(description)
            )
            interface = known_interface(reference.get("known"))
            if interface is not None:
                interface.register(self._remote_objects[number])
        return self._remote_objects[number]

    def _class_space(self, description: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _class_over(self, known: type) -> type:
        # For an object whose class both sides know, but which must stay where it is.
        if known not in self._known:
            description = {"qualname": known.__qualname__, "module": known.__module__, "doc": known.__doc__}
            description |= {"special": [], "none": [], "redefined": []}
            self._known[known] = stand_in_class(self, 0, known.__name__, (known,), description, {})
        return self._known[known]

    def _read_exception(self, kind: Any, place: tuple[Any, int], reference: dict[str, Any]) -> BaseException:
        if not issubclass(kind, BaseException):
            raise TypeError("no exception")
        args = tuple(self.read(arg) for arg in reference["args"])
        if type(kind) is not StandInType and kind.__module__ == "builtins":
            error = _builtin_exception(kind, args)
            self._remote_numbers[id(error)] = place[1]
            vars(error).update({str(key): self.read(one) for key, one in reference["fields"].items()})
        else:
            error = new_stand_in(kind if type(kind) is StandInType else self._class_over(kind), place, "exception")
            object.__setattr__(error, "args", args)
        cause = self.read(reference["cause"])
        if isinstance(cause, BaseException):
            error.__cause__ = cause
        context = self.read(reference["context"])
        if isinstance(context, BaseException):
            error.__context__ = context
        error.__suppress_context__ = reference["suppress"] is True
        return error

    def exception(self, error: dict[str, Any]) -> BaseException:
        if "exception" not in error:  # it holds something that must not leave its process
            return NotTransferable(f"{error['name']}: {error['text']}")
        found = self.read(error["exception"])
        if not isinstance(found, BaseException):
            raise TypeError("no exception")
        return found


def describe_error(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return {"name": type(error).__name__, "text": text}


def _builtin_exception(kind: Any, args: tuple[Any, ...]) -> BaseException:
    try:
        return kind(*args)
    except Exception:  # UnicodeDecodeError and similar ones need more arguments
        error = kind.__new__(kind)
        error.args = args
        return error


def _number(number: Any) -> int:
    if type(number) is not int:
        raise ValueError("no number of an object")
    return number
