"""A version reaches users: the gate, the canary's steps, the stores of the clusters, and the way back."""

from etude.live.release.gate import play_gate
from etude.live.release.player import Player
