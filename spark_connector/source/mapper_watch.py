"""How far a query's mappers are: the driver polls them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from shuffle.durable.mapper_state import lookup_state
from shuffle.errors import StoreUnavailable
from shuffle.ids import MapperIndex, Token
from shuffle.mapper.reader import Input
from shuffle.mapper.readers.opening import built_in_input, open_input
from shuffle.spark_connector.source.offsets import Indexes
from shuffle.spark_connector.source.processor import MapperProgress, Processor, Shape
from shuffle.spark_connector.waiting import Waiting
from shuffle.spec.config import ProcessorSpec
from shuffle.spec.inputs import input_described_as
from shuffle.statestore import StateClient

POLL_S = 0.05
"""The time in seconds between two polls of the mappers."""


class MapperWatch:
    """What the mappers have produced, by polling them. A mapper that is away delays only its own rows."""

    def __init__(self, processor: Processor, shape: Shape) -> None:
        self._processor = processor
        self._silences = [Waiting(processor.store.timeout_s) for _ in range(shape.mapper_count)]
        self.latest: Indexes = [-1] * shape.mapper_count
        self.produced: dict[int, MapperProgress] = {}

    def look(self) -> None:
        self.produced = self._processor.produced()
        for mapper, progress in self.produced.items():
            if mapper < len(self.latest):
                self._silences[mapper].restart()
                self.latest[mapper] = max(self.latest[mapper], progress.last_row_index)

    def refuse_silence(self) -> None:
        """Report a mapper that has not responded for a while; raise ``StoreUnavailable`` after the time-out."""
        for mapper, silence in enumerate(self._silences):
            silence.report(f"processor {self._processor.name}: mapper {mapper} does not answer")
            if silence.is_over:
                raise StoreUnavailable(
                    f"processor {self._processor.name}: mapper {mapper} has not answered for "
                    f"{self._processor.store.timeout_s:g} s: start it, or raise the option 'timeout'",
                    mapper=mapper,
                )

    def wait_for_all(self) -> None:
        while True:
            self.look()
            if len(self.produced) >= len(self.latest):
                return
            self.refuse_silence()
            time.sleep(POLL_S)


class SourceInput:
    """The processor's input, opened in the driver to find out where it ends.

    The spec says what the input is. Without a spec, an input that comes with the project is opened by its description
    in the store; an input of the user's own cannot be opened then.
    """

    def __init__(self, processor: Processor, shape: Shape, spec: ProcessorSpec | None) -> None:
        self._processor = processor
        self._spec = spec
        self._described = None if spec is not None else input_described_as(shape.input)
        self._client: StateClient | None = None
        self._input: Input | None = None

    def ends(self) -> Mapping[int, Token] | None:
        """For each mapper the token at which its input ends now; None if the input does not know, or is not known."""

        def call(client: StateClient) -> Mapping[int, Token] | None:
            opened = self._opened(client)
            return None if opened is None else opened.ends()

        return self._processor.store.with_retries(call)

    def reached(self, mapper: int, token: Token, end: Token) -> bool:
        """Whether a mapper at ``token`` has read everything up to ``end``."""

        def call(client: StateClient) -> bool:
            if not token and not self._begins_empty(client, mapper):
                return False
            opened = self._opened(client)
            return opened is not None and opened.reached(mapper, token, end)

        return self._processor.store.with_retries(call)

    def _begins_empty(self, client: StateClient, mapper: int) -> bool:
        """Whether an empty token is the mapper's real position: one that is starting has not read its state yet."""
        state = lookup_state(client, self._processor.name, MapperIndex(mapper))
        return state is not None and not state.continuation_token

    def _opened(self, client: StateClient) -> Input | None:
        """The input over ``client``. The client is another one when the store has moved; the input is opened again."""
        if client is not self._client:
            self.close()
            if self._spec is not None:
                self._input = open_input(self._spec, client)
            elif self._described is not None:
                self._input = built_in_input(self._described, client)
            self._client = client
        return self._input

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = self._client = None


class Goal:
    """The end of a query with ``Trigger.AvailableNow``: the end of the input as it was when the query began."""

    def __init__(self, processor: Processor, shape: Shape, spec: ProcessorSpec | None = None) -> None:
        self._source = SourceInput(processor, shape, spec)
        self._ends = self._source.ends()
        self._caps: list[int | None] = [None] * shape.mapper_count

    def look(self, watch: MapperWatch) -> None:
        """Cap each mapper that has read up to the goal at what it has produced by then."""
        for mapper, progress in watch.produced.items():
            if self._caps[mapper] is None and self._is_at_end(mapper, progress):
                self._caps[mapper] = watch.latest[mapper]

    def _is_at_end(self, mapper: int, progress: MapperProgress) -> bool:
        # An input that does not know its end gives no goal; there the goal is what was mapped when the query began.
        end = None if self._ends is None else self._ends.get(mapper)
        return end is None or self._source.reached(mapper, progress.token, end)

    def close(self) -> None:
        self._source.close()

    @property
    def reached(self) -> bool:
        return None not in self._caps

    def capped(self, latest: Indexes) -> Indexes:
        return [last if cap is None else min(last, cap) for last, cap in zip(latest, self._caps, strict=True)]
