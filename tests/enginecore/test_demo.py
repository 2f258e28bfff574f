"""The built-in model, and the shared story model, say what transformers says."""

import json
from pathlib import Path

import pytest

from checkpoints import Oracle, same_tokens
from cores import Ask, run, start_core
from enginecore import gguf
from enginecore.model_files import locate

SHARED = Path(__file__).parents[3] / "shared" / "data"

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers.",
    "def fibonacci(n):",
    "Once upon a time",
    "The quick brown fox jumps over",
    "Translate to French: good morning",
    "Who wrote Hamlet?",
    "1 + 1 =",
    "What is a black hole?",
    "Name a mammal that lays eggs.",
    "How do I boil an egg?",
    "Dear Sir or Madam,",
    "import numpy as np",
    "Give me a recipe for pancakes.",
    "The Roman Empire fell because",
    "Summarise the theory of evolution.",
    "What does HTTP stand for?",
    "Tell me a joke.",
]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not beside this checkout")
def test_the_story_model_tells_its_story():
    folder = SHARED / "stories260k"
    expected = json.loads((folder / "expected_greedy.json").read_text())
    ask = Ask(expected["prompt_token_ids"], expected["max_new_tokens"])
    assert run(start_core(folder), [ask])[0].tokens == expected["greedy_token_ids"]


@pytest.fixture(scope="module")
def demo():
    return locate("demo")


def test_the_demo_is_read_as_transformers_reads_it(demo):
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(demo.path.parent, gguf_file=demo.path.name).to_dict()
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        assert demo.config[name] == theirs[name]
    assert demo.config["num_key_value_heads"] == theirs["num_key_value_heads"]
    assert demo.config["rope_parameters"]["rope_theta"] == theirs["rope_parameters"]["rope_theta"]


@pytest.mark.slow
def test_twenty_prompts_of_the_demo_as_transformers_answers_them(demo):
    oracle = Oracle(demo.path.parent, gguf_file=demo.path.name)
    vocabulary = gguf.read(demo.path).metadata["tokenizer.ggml.tokens"]
    words = {text: number for number, text in enumerate(vocabulary)}
    # Whole words of the vocabulary stand in for a tokenizer, which is tested elsewhere.
    prompts = [[words[w] for w in q.replace(" ", " Ġ").split() if w in words] or [1] for q in QUESTIONS]
    answers = run(start_core("demo"), [Ask(prompt, 64) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same_tokens(answer.tokens, *oracle.greedy(prompt, 64))
