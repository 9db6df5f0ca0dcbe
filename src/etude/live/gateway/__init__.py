"""The server in front of the clusters: routes requests to the arm of their account, and records turns and signals."""

from etude.live.gateway.gateway import serve
from etude.live.gateway.judging import calibrated
