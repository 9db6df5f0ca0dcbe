"""The server in front of the clusters: requests are routed to the arm of their account, turns and signals recorded."""

from etude.live.gateway.gateway import serve
