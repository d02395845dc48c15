"""A server with OpenAI's interface over octavo.serving.Scheduler: `python -m octavo.serving`."""

from octavo.serving.server.app import create_app
from octavo.serving.server.engine import Engine
from octavo.serving.server.models import Model
from octavo.serving.server.text import TextStream, Tokenizer

__all__ = ["Engine", "Model", "TextStream", "Tokenizer", "create_app"]
