"""Weight publication: live weights from the learner to the rollout engines."""

from perdure.publish.directory import weights_directory
from perdure.publish.publication import Acknowledgements, Publication, PublicationOptions
from perdure.publish.transports import FileTransport, InProcessTransport, WeightTransport

__all__ = [
    "Acknowledgements",
    "FileTransport",
    "InProcessTransport",
    "Publication",
    "PublicationOptions",
    "WeightTransport",
    "weights_directory",
]
