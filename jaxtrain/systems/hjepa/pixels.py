"""What a pixel means: ImageNet's statistics, RGB in [0, 1]."""

import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
