"""Sessions of coding agents as conversations to learn from: `etude corpus sessions`.

    file -> its format -> threads (messages; weight 1 where the model said them) -> one tree -> a row for each leaf

`session_files.py` files and lines, and the format of each
`thread.py`        a thread, and the tree in which equal beginnings of threads meet
`request_logs.py`  requests and answers of OpenAI's and Anthropic's APIs
`claude_code.py`, `codex.py`, `pi.py`   the session files of three agents, which datasets of agent traces hold, too
`trajectories.py`  ATIF trajectories, and rows of messages

Every message that a model said is learned once, in the context in which it was said. What the assistant says in a
request, without a record that the model said it, is context.
"""

from etude.corpus.sessions.request_logs import answered_thread
from etude.corpus.sessions.session_files import SessionReport, session_rows
from etude.corpus.sessions.thread import AgentThread
