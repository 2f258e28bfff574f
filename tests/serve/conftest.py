import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

sys.path.append(str(Path(__file__).parent))

from scripted_engine import ScriptedEngine

from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(cast(Any, engine), ServeConfig(served_model_name=("tiny", "alias")))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server"
    ) as client:
        yield client
