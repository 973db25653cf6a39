"""The formats of jobs and answers, in one place to import from: bodies in, bodies and batch lines out.

Owns nothing itself: bodies.py reads requests, responses.py writes answers, model_names.py compares names.
Input files are files.py's.
"""

from kvq.worker.bodies import ParsedBody, parse_body
from kvq.worker.model_names import matches_model, require_model
from kvq.worker.responses import Echo, error_line, output_line, response_body

__all__ = [
    "Echo",
    "ParsedBody",
    "error_line",
    "matches_model",
    "output_line",
    "parse_body",
    "require_model",
    "response_body",
]
