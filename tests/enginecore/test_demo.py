"""The built-in model, and the story model of `tests/data`, say what transformers says."""

import pytest

from checkpoints import Oracle, same_tokens
from cores import Ask, run, start_core
from data_files import STORIES
from enginecore import gguf
from enginecore.model_files import locate

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


def test_the_story_model_tells_its_stories_as_transformers_does():
    from transformers import AutoTokenizer

    oracle, tokenizer = Oracle(STORIES), AutoTokenizer.from_pretrained(STORIES)
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "The fox", "<|user|>Hi<|end|>")]
    answers = run(start_core(STORIES), [Ask(prompt, 120) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same_tokens(answer.tokens, *oracle.greedy(prompt, 120))


@pytest.fixture(scope="module")
def demo():
    return locate("demo")


@pytest.mark.slow
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
def test_prompts_of_the_demo_as_transformers_answers_them(demo):
    oracle = Oracle(demo.path.parent, gguf_file=demo.path.name)
    vocabulary = gguf.read(demo.path).metadata["tokenizer.ggml.tokens"]
    words = {text: number for number, text in enumerate(vocabulary)}
    # Whole words of the vocabulary stand in for a tokenizer, which is tested elsewhere.
    prompts = [[words[w] for w in q.replace(" ", " Ġ").split() if w in words] or [1] for q in QUESTIONS[::2]]
    answers = run(start_core("demo"), [Ask(prompt, 40) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert same_tokens(answer.tokens, *oracle.greedy(prompt, 40))
