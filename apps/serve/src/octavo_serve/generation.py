"""The prompts of one HTTP request, from their submission to their last output."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Self

from enginecore.errors import OctavoError, RequestAbortedError
from enginecore.frontend.openai.bodies import Body
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams
from octavo_serve.errors import ApiError
from octavo_serve.state import ServerState

if TYPE_CHECKING:
    from enginecore.async_engine import RequestStream
    from enginecore.frontend.frontend import Prompt


class Interrupted(ApiError):
    """The server stopped a request because it is shutting down."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down")


class Generation:
    """Runs prompts while it is entered; leaving it, in whatever way, aborts what has not finished."""

    def __init__(
        self,
        server: ServerState,
        request_id: str,
        prompts: Sequence["Prompt"],
        params: Sequence[SamplingParams],
        body: Body,
    ) -> None:
        """`params` are those of each prompt."""
        self._server = server
        self._request_id = request_id
        self._prompts = prompts
        self._params = params
        self._body = body
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> Self:
        """Submit every prompt, or none.

        Raises:
            RequestError: a prompt cannot be run as asked.
            ApiError: 503, no request can be taken now.
        """
        if self._server.trouble is not None:
            raise ApiError(503, self._server.trouble)
        self._server.generations.add(self)
        try:
            for prompt, params in zip(self._prompts, self._params, strict=True):
                self._streams.append(self._submit(prompt, params))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.generations.discard(self)
        for stream in self._streams:
            await stream.aclose()

    async def finished(self) -> list[RequestOutput]:
        """Return each prompt's final output; the parameters ask for FINAL_ONLY.

        Raises:
            ApiError: a prompt failed, or the server is shutting down.
        """
        return [output for stream in self._streams async for output in self._outputs_of(stream)]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield all outputs as they come, each with its prompt's index; raises as `finished`."""
        if len(self._streams) == 1:
            async for output in self._outputs_of(self._streams[0]):
                yield 0, output
            return
        # Bounded, so that a client that does not read holds up its own streams only.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(self._streams))
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self._streams))]
        try:
            unfinished = len(pumps)
            while unfinished:
                index, output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                unfinished -= output.finished
                yield index, output
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def interrupt(self) -> None:
        """Abort what has not finished; whoever reads the outputs gets `Interrupted`."""
        for stream in self._streams:
            await self._server.engine.abort(stream.request_id)

    def _submit(self, prompt: "Prompt", params: SamplingParams) -> "RequestStream":
        return self._server.engine.add_request(
            f"{self._request_id}-{next(self._server.numbers)}",
            prompt,
            params,
            priority=self._body.priority or 0,
            cache_salt=self._body.cache_salt,
        )

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, RequestOutput | Exception]]) -> None:
        try:
            async for output in self._outputs_of(self._streams[index]):
                await queue.put((index, output))
        except (ApiError, OctavoError) as error:
            await queue.put((index, error))

    async def _outputs_of(self, stream: "RequestStream") -> AsyncGenerator[RequestOutput]:
        try:
            async for output in stream:
                for sample in output.outputs:
                    if sample.finish_reason == "error":
                        raise ApiError(500, str(sample.stop_reason or "the engine gave this request up"))
                yield output
        except RequestAbortedError as error:
            raise Interrupted from error
