"""`etude tasks harden`: attacks every task of a dataset as an agent would, mends or drops those that fall.

attackers   the programs of packs (`audit/packs/tasks-*`), and the answers that are generated for one task
play        what they earn from one task
harden      all tasks, the mending, the new dataset
model       a model as attacker
calls       whether an answer that earns a reward behaves like the gold answer
"""

from etude.audit.harden.hardening import harden
