"""As `naive`, for rewards that ask a server: at most so many at a time, so many requests and tokens a minute."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

from verl.experimental.reward_loop.reward_manager.base import WholeBatch
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import register

logger = logging.getLogger(__name__)


class AsyncTokenBucket:
    """Tokens that come back at `rate_limit` per second, up to `max_tokens`; who takes more than there are waits."""

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit, self.max_tokens = rate_limit, max_tokens or rate_limit
        self.tokens, self.last_update = self.max_tokens, None
        self.lock = asyncio.Lock()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Takes tokens. More than fit into the bucket are taken on credit, which later ones wait for."""
        async with self.lock:  # held while waiting: requests go in the order in which they came
            self._refill()
            missing = num_tokens - self.tokens
            if missing > 0:
                await asyncio.sleep(missing / self.rate_limit)
                self._refill(full=max(self.max_tokens, num_tokens))
            self.tokens -= num_tokens

    def _refill(self, full: float | None = None) -> None:
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self.last_update is None else now - self.last_update
        self.tokens = min(full or self.max_tokens, self.tokens + passed * self.rate_limit)
        self.last_update = now


@register("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """`reward` of the settings holds max_concurrent (1), max_rpm, max_tpm, estimated_tokens_per_request (2000) and
    timeout (300 s). All managers of a process share the limits of the first. A response whose reward fails or takes
    too long has the score 0, and says so in `reward_extra_info`."""

    _semaphore: ClassVar[asyncio.Semaphore | None] = None
    _max_concurrent: ClassVar[int | None] = None
    _rpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _max_rpm: ClassVar[float | None] = None
    _tpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _max_tpm: ClassVar[float | None] = None
    _estimated_tokens_per_request: ClassVar[float | None] = None

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        given = (config or {}).get("reward") or {}
        limits = (given.get("max_rpm"), given.get("max_tpm"))
        if cls._class_initialized:
            if limits != (cls._max_rpm, cls._max_tpm):
                logger.warning(
                    "RateLimitedRewardManager: the limits of this process are max_rpm=%s, max_tpm=%s; max_rpm=%s, "
                    "max_tpm=%s are ignored",
                    cls._max_rpm,
                    cls._max_tpm,
                    *limits,
                )
            return
        super().init_class(config, tokenizer)
        most = int(given.get("max_concurrent", 1))
        cls._max_concurrent, cls._semaphore = most, asyncio.Semaphore(most)
        cls._max_rpm, cls._max_tpm = limits
        cls._rpm_limiter, cls._tpm_limiter = (None if one is None else AsyncTokenBucket(one / 60) for one in limits)
        cls._estimated_tokens_per_request = given.get("estimated_tokens_per_request", 2000)

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        num_examine: int | None = None,
        reward_fn_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        if tokenizer is None:
            raise TypeError("RateLimitedRewardManager requires `tokenizer`.")
        super().__init__(config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer)
        self.timeout = ((config or {}).get("reward") or {}).get("timeout", 300.0)

    async def _score(self, row: Any, text: str) -> Any:
        assert self._semaphore is not None and self._estimated_tokens_per_request is not None
        if self._rpm_limiter is not None:
            await self._rpm_limiter.acquire(1.0)
        if self._tpm_limiter is not None:
            await self._tpm_limiter.acquire(self._estimated_tokens_per_request)
        async with self._semaphore:
            try:
                return await asyncio.wait_for(super()._score(row, text), self.timeout)
            except TimeoutError:
                logger.warning("a reward took longer than %s s: %.100s...", self.timeout, text)
                return {"score": 0.0, "timeout": True, "acc": 0.0}
            except Exception as error:
                logger.exception("a reward failed: %.100s...", text)
                return {"score": 0.0, "error": str(error), "acc": 0.0}

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """All responses of a batch, as `verl.workers.reward_manager` are called."""
        return WholeBatch(self)(data, return_dict)
