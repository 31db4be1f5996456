"""Import torchvision, where it is of another build, before transformers does."""

from lowerdeck_zoo.models.libraries import import_torchvision

import_torchvision()
