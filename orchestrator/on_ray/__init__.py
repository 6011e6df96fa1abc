"""The only modules that import Ray: nodes, claims, actors, the executor, submission.

Two Ray features are off unless the user sets them, before Ray is imported: printing of dead
workers' messages into a driver's output (and the JSON of ``--json``), and automatic connection,
by which a late call could join or start another cluster.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
