"""The only modules that import Ray: nodes, claimed cards, actors, the executor, submission.

What Ray says of dead workers it prints to a driver's standard output, coloured, between the lines
of our log and into the JSON of ``--json``. Rows and events say it all, so that is switched off,
which has to happen before Ray is imported; a setting of the user's is left alone.

A call of Ray's outside a connection joins or starts a cluster of its own choice. For a call that
comes late, when the cluster is gone, this took ten minutes once, so that is switched off as well.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
