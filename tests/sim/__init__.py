"""A deterministic simulator: the real mappers, reducers and state store in a simulated world that follows from a seed.

Run as ``python -m tests.sim``; see ``docs/reliability.md``. Everything runs in one thread and in virtual time. Replaced
are the transport (``flight``, ``network``), the clock, random numbers and threads (``kernel``, ``shims``) and the disk
(``disk``); the rest is the product, loaded by ``product``.
"""
