"""Requests with `use_beam_search`: the n best continuations of each prompt, found over plain requests."""

from collections.abc import Sequence

from enginecore import BeamSearch, Prompt, Request, RequestOutput
from enginecore.frontend import openai
from octavo_serve.routes.requests import Client, raise_failure
from octavo_serve.state import ServerState


async def search_beams(
    server: ServerState,
    head: openai.Head,
    body: openai.Body,
    prompts: Sequence[Prompt],
    client: Client,
) -> list[RequestOutput]:
    """Return each prompt's beams as the samples of one output. All prompts run one token a round.

    Raises:
        RequestError: a prompt cannot be run, or the beams need more log probabilities than may be asked for.
        ApiError: a beam's token failed, or no request can be taken now.
    """
    frontend = server.frontend
    each = [openai.beam_params(body, len(prompt.token_ids), server.max_model_len) for prompt in prompts]
    searches = [
        BeamSearch(
            prompt,
            params,
            frontend.eos_ids,
            max_model_len=server.max_model_len,
            max_logprobs=server.engine.config.max_logprobs,
        )
        for prompt, params in zip(prompts, each, strict=True)
    ]
    params = each[0].step_params()
    # Those that the engine has taken and that have not ended.
    begun: list[BeamSearch] = []
    with BeamSearch.counting(begun, server.engine.metrics):
        while running := [search for search in searches if search.prompts]:
            requests = [
                Request(
                    f"{head.id}-{next(server.numbers)}", prompt, params, body.priority or 0, counted=False
                )
                for search in running
                for prompt in search.prompts
            ]
            outputs: dict[int, RequestOutput] = {}
            async with server.open_stream(requests, client.key, goes_on=bool(begun)) as stream:
                begun[:] = running
                client.record.follow(stream)
                async for index, output in stream:
                    raise_failure(output)
                    outputs[index] = output
            ordered = iter([outputs[index] for index in range(len(requests))])
            for search in running:
                search.advance([next(ordered) for _ in search.prompts])
                if not search.prompts:
                    search.count(server.engine.metrics)
                    begun.remove(search)
    hides = body.skip_special_tokens is not False
    return [search.request_output(head.id, frontend.tokenizer, hides) for search in searches]
