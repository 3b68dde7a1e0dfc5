"""What cases share: folders, tiny bases, adapters, engines, one engine process and one application; made when asked."""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from tests.cases.adapters import save_adapter
from tests.cases.families import save_base
from tests.cases.truth import Truth

T = TypeVar("T")

MAX_RANK = 16
"""`max_lora_rank` of every engine here."""


class World:
    """Everything is below `folder`, and ends with `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.truth = Truth()
        self._bases: dict[str, Path] = {}
        self._adapters: dict[str, Path] = {}
        self._engines: dict[str, LLMEngine] = {}
        self._numbers = itertools.count()
        self._opened = contextlib.ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._app: Any = None

    def close(self) -> None:
        """End the engine process and the application, if there are any."""
        self._opened.close()

    def new_folder(self) -> Path:
        """An empty folder of its own."""
        folder = self.folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        return folder

    def new_name(self) -> str:
        """An adapter name nobody has used."""
        return f"adapter-{next(self._numbers)}"

    def base(self, family: str = "llama") -> Path:
        """Folder of a tiny base model of `families.FAMILIES`."""
        if family not in self._bases:
            self._bases[family] = save_base(self.new_folder(), family)
        return self._bases[family]

    def adapter(self, family: str = "llama", **settings: Any) -> Path:
        """Folder of an adapter made by `save_adapter`, shared: copy it before changing it."""
        key = repr((family, sorted(settings.items())))
        if key not in self._adapters:
            self._adapters[key] = save_adapter(self.base(family), self.new_folder(), **settings)
        return self._adapters[key]

    def copy(self, folder: Path) -> Path:
        """A copy of a folder, to be changed."""
        return Path(shutil.copytree(folder, self.new_folder() / "copy"))

    def engine(self, family: str = "llama") -> LLMEngine:
        """A long-lived engine of four slots, idle between cases."""
        if family not in self._engines:
            self._engines[family] = start_engine(self.base(family))
        engine = self._engines[family]
        if engine.has_work():
            # A case ended in the middle of a request.
            del self._engines[family]
            return self.engine(family)
        return engine

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 120) -> T:
        """Run a coroutine on the one event loop that `client` lives on."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._opened.callback(self._loop.close)
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    @property
    def client(self) -> Any:
        """A started `EngineClient` of the base "llama" with two slots, for `run`."""
        if self._client is None:
            from deployments.engine_client import EngineClient

            config = engine_config(self.base(), num_threads=1)
            client = EngineClient(config, LoRAConfig(enable_lora=True, max_num_loras=2), stall_timeout_s=30)
            self.run(client.start(60))
            self._opened.callback(lambda: self.run(client.close()))
            self._client = client
        return self._client

    @property
    def app(self) -> Any:
        """The application over HTTP, as `over_http.App`."""
        if self._app is None:
            from tests.cases.application import application

            self._app = self._opened.enter_context(application(self))
        return self._app


def engine_config(base: Path, **settings: Any) -> EngineConfig:
    """Settings of a tiny fp32 engine on the CPU."""
    return EngineConfig(model=base, **{"dtype": "float32", "device": "cpu", "kv_cache_tokens": 2048, **settings})


def start_engine(
    base: Path, *, slots: int = 4, paths: tuple[str, ...] = (), lora: dict[str, Any] | None = None, **settings: Any
) -> LLMEngine:
    """An engine in this process; no slots: LoRA off."""
    fields: dict[str, Any] = {"max_num_loras": slots, "max_lora_rank": MAX_RANK, "lora_paths": paths, **(lora or {})}
    lora_config = LoRAConfig(enable_lora=True, **fields) if slots else LoRAConfig()
    return LLMEngine(engine_config(base, **settings), lora_config)


@contextlib.contextmanager
def new_world(folder: Path) -> Iterator[World]:
    """A world that is closed at the end."""
    world = World(folder)
    try:
        yield world
    finally:
        world.close()
