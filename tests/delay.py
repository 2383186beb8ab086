"""A block that passes its input on, late: for tests in which devices must arrive in another order."""

import time

from endings import Calling


class Late(Calling):
    """Sleeps ``seconds(device)`` in the forward and the backward pass."""

    def __init__(self, seconds):
        super().__init__(lambda device, direction: time.sleep(seconds(device)))
