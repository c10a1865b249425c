"""The errors of Coop: what the world can do wrong, as sentences with facts.

CoopError
├── BudgetError       a budget that cannot be parsed, or under which the model cannot run
├── CheckpointError   a folder that is not a checkpoint coop can run
│   └── LayoutError   expert weights that cannot be found or are stored in a way coop cannot read in place
├── StoreError        bytes on disk that are missing, damaged, or changed under the reader
├── ProfileError      a profile that is damaged, hostile, or of another model
├── RecipeError       a recipe or an override that is not valid
├── DataError         training data that cannot be used
├── SaveError         a checkpoint or a result that could not be written
├── RoutingError      a router that asked for an expert that does not exist
├── NumberError       logits that are not finite numbers
├── RequestError      a request that cannot be run as asked
├── PrefetchError     a loader thread died or did not answer in time
└── ClosedError       a call on a runtime that has been closed

Faults of our own are assertions, not CoopErrors. Command lines print a CoopError as one line and exit with 2.
"""

from __future__ import annotations


class CoopError(Exception):
    """Base of everything that coop raises about the world."""


class BudgetError(CoopError):
    """A budget that is malformed or smaller than the smallest that runs."""


class CheckpointError(CoopError):
    """A folder that does not hold a checkpoint coop can run."""


class LayoutError(CheckpointError):
    """Expert tensors that are missing or stored in a form that cannot be read one expert at a time."""


class StoreError(CoopError):
    """Bytes that could not be read as their header promises.

    Args:
        path: the file.
        tensor: the tensor, or "" for the whole file.
        what: what is wrong, with both numbers.
    """

    def __init__(self, path: object, tensor: str, what: str) -> None:
        self.path, self.tensor, self.what = str(path), tensor, what
        super().__init__(f"{path}: {tensor}: {what}" if tensor else f"{path}: {what}")


class ProfileError(CoopError):
    """A profile that is refused, with the reason."""


class RecipeError(CoopError):
    """A recipe that is refused, with every reason."""


class DataError(CoopError):
    """Training data that is refused, with file and line where there is one."""


class SaveError(CoopError):
    """A checkpoint or a result that could not be written, with the reason and what is whole."""


class RoutingError(CoopError):
    """An expert index outside the layer."""


class NumberError(CoopError):
    """Logits that are NaN or infinite: no token can be picked from them."""


class RequestError(CoopError):
    """A request that cannot be run as asked, with what to change."""


class PrefetchError(CoopError):
    """A loader thread that died or missed its deadline."""


class ClosedError(CoopError):
    """A call on something that was closed."""
