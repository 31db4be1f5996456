"""What a program must hold so that the official runtime neither crashes nor errs."""

from lowerdeck.serializer.verify.hazards import Hazard
from lowerdeck.serializer.verify.verify import verify_pte

__all__ = ["Hazard", "verify_pte"]
