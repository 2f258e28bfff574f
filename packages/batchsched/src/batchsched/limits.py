"""How much one step may hold."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds every plan keeps.

    max_num_seqs: rows, that is requests that hold memory at once.
    max_num_batched_tokens: tokens a step, prefill chunks and decodes together.
    max_model_len: tokens of a request, prompt and generated ones together.
    long_prefill_token_threshold: most tokens of one request in a step, so that a long prompt leaves budget
        for others; 0 for no such bound.
    headroom: blocks that an admission leaves free for each running row; 0.5 leaves one for two rows. Rows
        take a block every block_size steps: without slack the newcomer is soon preempted for them, and its
        prefill was in vain.
    stages: steps that run at once, each in another stage of a pipeline. With more than one, no step takes a
        row whose newest token is not known yet, and rows that decode are spread over so many steps.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    headroom: float = 0.5
    stages: int = 1

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}: at least 1 row is needed")
        if self.max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: a step runs at least 1 token"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}: a prompt and its continuation are at least 2 tokens"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}: 0 turns it off, "
                "a positive number bounds the chunks"
            )
        if self.headroom < 0:
            raise ValueError(f"headroom is {self.headroom}: an admission leaves 0 or more blocks a row free")
        if self.stages < 1:
            raise ValueError(f"stages is {self.stages}: a pipeline has at least 1")

    @property
    def chunk(self) -> int:
        """Most tokens of one request in a step, by either bound."""
        if self.long_prefill_token_threshold:
            return min(self.long_prefill_token_threshold, self.max_num_batched_tokens)
        return self.max_num_batched_tokens
