"""Calls between processes: a message there, a message back, and what can happen to either.

A call ends in one of three ways: with the answer (or the callee's error), with ``NotReached`` (it is certain that
nobody got the request) or with ``NoAnswer`` (nothing is certain). A request may arrive twice, or long after its caller
has given up, and at another instance that has taken over the address: then it is served all the same, and its answer
finds nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffle.errors import ShuffleError, from_wire, to_wire
from tests.sim.kernel import Process, Task, World, current


class NotReached(Exception):
    """Nobody was there."""


class NoAnswer(Exception):
    """The connection broke, or the time was over."""


REORDER_US_MAX = 40_000
"""So long a message is held back to let others pass."""

Handler = Callable[["Call"], Any]


class Call:
    """One call under way."""

    __slots__ = ("address", "caller", "given_up", "label", "meant_for", "network", "outcome", "task")

    def __init__(self, network: Network, task: Task, address: str, label: str) -> None:
        self.network = network
        self.caller = task.process
        self.address = address
        self.label = label
        self.task = task
        found = network.servers.get(address)
        self.meant_for = found[0] if found is not None else None
        self.outcome: tuple[str, Any] | None = None
        self.given_up = False

    def finish(self, kind: str, value: Any) -> None:
        if self.outcome is None and not self.given_up:
            self.outcome = kind, value
            self.task.wake_now(True)


class Trouble:
    """What a fault does to the messages of some connections, for a while. ``faults`` makes these."""

    def __init__(
        self,
        kind: str,
        chance: float,
        matches: Callable[[str, str, str], bool],
        rng: Any,
        delay_us_max: int = 1_500_000,
    ) -> None:
        self.kind = kind
        self.chance = chance
        self.matches = matches
        self.rng = rng
        self.delay_us_max = delay_us_max


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self._random = world.streams["network"].random
        self.servers: dict[str, tuple[Process, Any]] = {}
        """Who listens where: the process, and what its handlers work on."""
        self.troubles: list[Trouble] = []
        self._running: dict[Process, list[Call]] = {}
        self._held: dict[tuple[str, str], list[int]] = {}
        """By link, when the messages that were held back arrive, as long as none has overtaken them."""

    def listen(self, address: str, process: Process, service: Any) -> None:
        self.servers[address] = process, service
        process.at_end.append(lambda: self.close(address, process))

    def close(self, address: str, process: Process) -> None:
        if address in self.servers and self.servers[address][0] is process:
            del self.servers[address]
        for call in self._running.pop(process, []):
            # The caller's side of the connection learns of it, sooner or later.
            self._later(call, "broken", None, "reset")

    def call(self, address: str, label: str, handler: Callable[[Any, Call], Any], timeout_s: float) -> Any:
        """Runs ``handler(service, call)`` at whoever listens at ``address`` when the request arrives."""
        task = current()
        call = Call(self, task, address, label)
        self._send(call, handler)
        if call.outcome is None:
            task.park(int(timeout_s * 1_000_000))
        call.given_up = True
        if call.outcome is None:
            self.world.mark("call timed out")
            raise NoAnswer(f"{address} did not answer")
        kind, value = call.outcome
        if kind == "answer":
            return value
        if kind == "error":
            call.outcome = None
            try:
                raise value
            finally:
                del value  # An error refers to this frame.
        if kind == "refused":
            raise NotReached(f"nobody is at {address}")
        raise NoAnswer(f"the connection to {address} broke")

    def post(self, address: str, label: str, handler: Callable[[Any, Any], Any], process: Process) -> None:
        """A message without an answer."""
        for delay_us in self._fates(process.name, address, label):
            self.world.at(self.world.now_us + delay_us, self._deliver_post, (address, label, handler))

    def _deliver_post(self, message: tuple[str, str, Callable[[Any, Any], Any]]) -> None:
        address, label, handler = message
        found = self.servers.get(address)
        if found is not None:
            process, service = found
            process.serve(label, lambda: handler(service, None))

    # the two messages

    def _send(self, call: Call, handler: Callable[[Any, Call], Any]) -> None:
        for delay_us in self._fates(call.caller.name, call.address, call.label):
            self.world.at(self.world.now_us + delay_us, self._deliver, (call, handler))

    def _deliver(self, message: tuple[Call, Callable[[Any, Call], Any]]) -> None:
        call, handler = message
        found = self.servers.get(call.address)
        if found is None:
            self._later(call, "refused", None, "refused")
            return
        process, service = found
        if call.given_up:
            self.world.mark("request arrived after its caller gave up")
        if call.meant_for is not None and call.meant_for is not process:
            self.world.mark("a message reached another life of its target")
        self._running.setdefault(process, []).append(call)

        def serve() -> None:
            try:
                kind, value = "answer", handler(service, call)
            except ShuffleError as error:
                kind, value = "error", from_wire(to_wire(error))
            running = self._running.get(process)
            if running is not None and call in running:
                running.remove(call)
            self._later(call, kind, value, "answer")

        process.serve(call.label, serve)

    def _later(self, call: Call, kind: str, value: Any, label: str) -> None:
        for delay_us in self._fates(call.address, call.caller.name, f"{call.label}:{label}"):
            self.world.at(self.world.now_us + delay_us, self._answer, (call, kind, value))

    def _answer(self, message: tuple[Call, str, Any]) -> None:
        call, kind, value = message
        if call.given_up:
            self.world.mark("answer found nobody")
        call.finish(kind, value)

    def _fates(self, source: str, target: str, label: str) -> list[int]:
        """When each copy of a message arrives; none is a message lost."""
        copies = [int(150 + self._random() * 1_500)]
        if not self.troubles and not self._held:
            return copies
        for trouble in self.troubles:
            if not trouble.matches(source, target, label) or trouble.rng.random() >= trouble.chance:
                continue
            kind = trouble.kind
            if kind == "lose":
                copies = []
            elif kind == "delay":
                slow_us = int(trouble.rng.random() ** 2 * trouble.delay_us_max)
                copies = [copy + slow_us for copy in copies]
            elif kind == "double":
                if ":" in label:
                    continue  # Of two answers the caller takes the first; the second would do nothing to anybody.
                copies = copies + [copy + int(trouble.rng.random() * 300_000) for copy in copies[:1]]
            elif kind == "reorder":
                if copies:
                    copies = [copy + int(trouble.rng.random() * REORDER_US_MAX) for copy in copies]
                    self._held.setdefault((source, target), []).append(self.world.now_us + copies[0])
                continue  # Counted when another one has overtaken it.
            self.world.fault(kind, source, target, label)
        held = self._held.get((source, target))
        if held and copies:
            self._count_overtaken(source, target, label, held, self.world.now_us + copies[0])
        return copies

    def _count_overtaken(self, source: str, target: str, label: str, held: list[int], arrives_us: int) -> None:
        now_us = self.world.now_us
        left = [held_us for held_us in held if held_us > now_us]
        overtaken = [held_us for held_us in left if held_us > arrives_us]
        for _ in overtaken:
            self.world.fault("reorder", source, target, label)
        held[:] = [held_us for held_us in left if held_us <= arrives_us]
