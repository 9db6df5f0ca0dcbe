"""The way out of a box, off by default: an allow-list of hosts and a dated package index.

A live box with a way out has a listener on its own loopback. The listener's descriptor is handed to the owner over the
box's unix socket, and the owner accepts from it: no process of the box, and no address of the host, lies in between.
"""

from etude.sandbox.egress.mirror import INDEX_JSON
from etude.sandbox.egress.policy import (
    AllowedHost,
    Egress,
    EgressRequest,
    configured_egress,
    normal_project,
    package_index,
    parse_allowed_hosts,
    wheel_project,
)
