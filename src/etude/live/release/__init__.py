"""The release of a version to users: the gate, the canary's steps, the stores of the clusters, and rollback."""

from etude.live.release.gate import play_gate
from etude.live.release.player import player_of
