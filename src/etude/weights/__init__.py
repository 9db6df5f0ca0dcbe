"""The chain of weight versions between the trainer and the engines.

    publisher, snapshots, ranks      the trainer's side: copies of the tensors, written as deltas and anchors
    manifest, signature              a version's manifest, which is its commit point, and whom to trust
    payloads, content                which payloads lead to a version, their bytes, and the bits on the host
    receiver, live, repair, replica  the engine's side: staged, swapped in together with the replica, repaired
    relay, coordinator, service      the small servers of a cluster
    retention, audit, export         what a store keeps, whether it is whole, and versions as model folders
    flip_law                         how much a step will change, before it is made

The codec is `ulpd`, which imports nothing else of etude. Imports models, store and records. Public: `Publisher`,
`Receiver`, and `content.load` for reading a version.
"""
