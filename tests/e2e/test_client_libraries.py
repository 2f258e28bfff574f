"""Libraries that recognise a prompt that is too long: litellm falls back, langchain trims the prompt."""

import os
from pathlib import Path

import pytest

import successor_model
from server_process import Server

pytestmark = pytest.mark.slow

LONG = [{"role": "user", "content": "a" * 300}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    flags = ("--device", "cpu", "--max-model-len", "256", "--num-blocks-override", "64")
    started = Server(successor_model.write(folder), *flags, "--served-model-name", "tiny")
    yield started
    started.stop()


def test_litellm_falls_back_to_a_model_with_a_longer_context(server):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    ours = {"model": "hosted_vllm/tiny", "api_base": f"{server.url}/v1", "api_key": "none"}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=LONG, **ours, num_retries=0)
    longer = {"model": "openai/longer", "api_key": "none", "mock_response": "from the longer one"}
    router = litellm.Router(
        [
            {"model_name": "short", "litellm_params": ours},
            {"model_name": "long", "litellm_params": longer},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    answer = router.completion("short", messages=LONG)
    assert answer.choices[0].message.content == "from the longer one"


def test_langchain_raises_its_context_overflow_error(server):
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(ContextOverflowError):
        model.invoke("a" * 300)
    with pytest.raises(ContextOverflowError):
        list(model.stream("a" * 300))
