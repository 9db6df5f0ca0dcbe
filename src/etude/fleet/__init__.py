"""Placers: a process of a run is started where the fleet says, watched, and started again when it ends by itself.

    jobs          jobs, and the surface of placers
    place         the placers by their tables, and `local`: processes of this machine
    supervise     one process that is started again
    keeper        a process that supervises one child on a node of Ray, and outlives its actor for a while
    ray_actor     the actor: it starts keepers, or finds them again
    ray_bridge    the process that talks to Ray
    ray_jobs      the placer `ray`, in the run's process, which never imports Ray
    schedulers    files for SLURM and KubeRay

A placer knows nothing of engines, players or trainers: jobs are argument lists. Imports configuration, processes and
code alone, no torch. Nothing of etude's is pickled: actors take and return text.
"""

from etude.fleet.jobs import FleetJob, Placed, PlacedJob, Placer, namespace, stop_all
from etude.fleet.place import open_placer
from etude.fleet.ray_jobs import ray_log
from etude.fleet.schedulers import Machine, kuberay_files, slurm_files

PUBLIC = ("",)
