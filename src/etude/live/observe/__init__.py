"""The observer on a developer's machine: the survival of edits in a work tree, sent to the gateway as signals.

Of the other folders it imports `live/log/records.py` alone.
"""

from etude.live.observe.delivery import Delivery
from etude.live.observe.hooks import install_hooks, log_of, remove_hooks
from etude.live.observe.project import read_consent
from etude.live.observe.spool import AlreadyWatched
from etude.live.observe.watch import open_watcher
from etude.live.observe.worktree import TextRepository
