"""The chain of weight versions between the trainer and the engines.

    publisher, snapshots             the trainer's side: copies of the tensors, written as deltas and anchors
    ranks, halo                      several ranks that hold shards: their words to each other, the edges of shards
    manifest, signature              a version's manifest, which is its commit point; the rules of its readers; keys
    payloads, content                the payloads that lead to a version, their bytes, and the bits on the host
    receiver                         the engine's side: versions staged and swapped into the live tensors
    slabs                            the elements that a process holds: whole tensors, or the slices of a worker
    repair                           damaged chunks repaired
    relay                            the small server of a cluster
    retention, audit, export         removal of unneeded objects, checks, and versions as model folders
    copies                           copies between stores, a few tensors at a time
    adapters, runs                   versions of adapters (LoRA), and the models of runs by name
    preflight/                       checks of a model folder, and its mended copy

The codec is `ulpd`, which imports nothing else of etude. Imports models, store and records. `content.load` reads a
version.
"""

# pyright: reportUnusedImport=false
from etude.weights.manifest import Trust, manifests, newest_manifest, published_versions, read_manifest
from etude.weights.runs import model_folder, rl_config, run_and_version, with_models
from etude.weights.signature import generate_key, read_private_key, read_public_key

PUBLIC = (
    "",
    "adapters",
    "audit",
    "content",
    "copies",
    "export",
    "payloads",
    "preflight",
    "publisher",
    "ranks",
    "receiver",
    "repair",
    "retention",
    "slabs",
    "ulpd",
)
