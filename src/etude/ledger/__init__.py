"""The run ledger: a database that holds every admitted episode exactly once, from admission to training.

    ledger                           the class `Ledger`: every method is a transaction
    group_rows                       the statements that read groups or mark them as consumed
    tables                           transactions on the tables, and their repetition
    schema                           the tables
    database                         opens SQLite or PostgreSQL; repetition while the database server is away
    leaving_behind                   which groups a step may leave to later ones
    conservation, representation     proofs and figures for reports
    flagged                          flags of cheating, and episodes of impossible tasks
    digests                          of episodes' bytes and of rows
    leases                           the end of a lease
    membership                       the engines and players of a run, and its stage for players
    stored_episodes                  the episodes of a run folder, for commands

Imports records, store and configuration only, no torch. Token arrays are blobs in the store.
"""

from etude.ledger.database import Outage, open_database, parse_database_url
from etude.ledger.digests import BlobDamaged, get_blob, put_blob
from etude.ledger.flagged import FlaggedEpisode, ImpossibleCounts
from etude.ledger.leases import ELSEWHERE
from etude.ledger.ledger import EpisodeLease, GroupResult, Ledger, blob_key
from etude.ledger.membership import MemberPlayer, MemberState
from etude.ledger.stored_episodes import StoredEpisodes, run_episodes

PUBLIC = ("",)
