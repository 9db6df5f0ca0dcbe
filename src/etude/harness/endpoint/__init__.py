"""The interception endpoint: an unmodified agent requests turns in its own API, and every token is recorded.

`server` routes requests to the formats of `protocol/apis`; `recording` keeps the token ledgers of one episode.
"""

from etude.harness.endpoint.recording import Recording
from etude.harness.endpoint.server import Endpoint, open_endpoint
