"""The formats of OpenAI's chat completions and responses, and of Anthropic's messages, for servers of both kinds: the
endpoint for outside agents (`harness/endpoint`), and the inference server (`inference/server`).

`reading.py`        the messages and tools of a request of any API
`answers.py`        the message of an answer of any API
`conversation.py`   a request, and the arrangement of its messages
`turn.py`           an answer, during sampling and complete
`chat.py`, `responses.py`, `anthropic.py`   one API each: its requests, answers and refusals
"""

from etude.protocol.apis.answers import answer_message
from etude.protocol.apis.conversation import (
    AgentRequest,
    RequestRefused,
    arranged,
    as_refusal,
    conversation_digest,
    conversation_digests,
    to_answer,
)
from etude.protocol.apis.reading import read, tools_of
from etude.protocol.apis.refusals import SHAPED_HANDLERS, shaped_refusal
from etude.protocol.apis.turn import SampledTurn, answered_lines, answering, failed, merge_streams, stop_overlap
