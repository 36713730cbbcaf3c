"""What a user says about restarts in place."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["COMMAND_CEL", "COMMAND_RULE", "InPlace"]

COMMAND_RULE = (
    "failurePolicy.inPlace needs the command of the first container in the template: write it into its field command,"
    " as the one that its image has cannot be known"
)
COMMAND_CEL = (
    "!has(self.failurePolicy.inPlace) || size(self.template.spec.containers) == 0"
    " || (has(self.template.spec.containers[0].command) && size(self.template.spec.containers[0].command) > 0)"
)
_MODULE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"


class InPlace(SpecPart):
    """How a crashed training process is started again in the pods that it had."""

    preload: tuple[Annotated[str, Field(min_length=1, max_length=256, pattern=_MODULE)], ...] = Field(
        default=("fthsdp.preload",), strict=False, max_length=64
    )
    """Modules that an interpreter beside the training process has imported, from which the command is started where it
    is python with a script or with -m: the default is torch with all that it imports later. Empty: none is kept, and a
    restart begins with a cold start."""
