"""The parts of ``orchestrator.schedule``: pure bookkeeping and decisions, no I/O and no clock.

record.py      settings, and what is known of each job
needs.py       jobs that may not start before others have succeeded
pending.py     jobs that wait, by width and residency key, longest first
cards.py       nodes, cards and workers; what is open and what is reserved
leases.py      who holds which cards; starts and stops workers
assignment.py  which job gets which cards
pool.py        the four above, for one kind of accelerator
ledger.py      rows, pauses, and which jobs have ended
verdicts.py    what follows from the end of an attempt
breaker.py     stops a run in which everything fails at once
"""
