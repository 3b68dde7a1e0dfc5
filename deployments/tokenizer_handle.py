"""Calls about tokens to whichever replica answers."""

import asyncio
import logging
from typing import cast

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.generation import Refusal
from deployments.text_calls import TextCall, TextTokens, TokensCall
from lora_core.errors import EngineDead

logger = logging.getLogger(__name__)

MAX_TRIES = 4
PAUSE_S = 0.2


class TokenizerHandle:
    """The engine deployment's tokenizer as the ingress sees it. All replicas have the same one."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def tokenize(self, call: TextCall) -> TextTokens:
        """The tokens of a text. Raises InvalidRequest; EngineDead where no replica answers."""
        return cast(TextTokens, await self._ask("tokenize", call))

    async def detokenize(self, call: TokensCall) -> str:
        """The text of tokens. Raises InvalidRequest; EngineDead where no replica answers."""
        return cast(str, await self._ask("detokenize", call))

    async def _ask(self, method: str, call: TextCall | TokensCall) -> object:
        for is_last in (False,) * (MAX_TRIES - 1) + (True,):
            try:
                answer = await getattr(self._handle, method).remote(call)
            except RayTaskError as error:
                raise error.cause from None
            except TaskCancelledError:
                raise
            except (RayError, DeploymentUnavailableError) as error:
                # Ray has many words for a dead actor.
                summary = f"{type(error).__name__}: {error}".partition("\n")[0]
                if is_last:
                    raise EngineDead(f"no replica answers ({summary})") from None
                logger.warning("%s failed (%s); trying another replica", method, summary)
                await asyncio.sleep(PAUSE_S)
                continue
            if isinstance(answer, Refusal):
                raise answer.error()
            return answer
        raise AssertionError("the last try returns or raises")
