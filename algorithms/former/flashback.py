"""``fedemu.algorithms.flashback``, a former import place. The method is in ``fedemu.algorithms.methods.flashback``."""

from fedemu.algorithms.methods.flashback import DynamicLoss as DynamicLoss
from fedemu.algorithms.methods.flashback import Flashback as Flashback
from fedemu.algorithms.methods.flashback import FlashbackState as FlashbackState
from fedemu.algorithms.methods.flashback import Knowledge as Knowledge
from fedemu.algorithms.methods.flashback import accumulate_knowledge as accumulate_knowledge
from fedemu.algorithms.methods.flashback import flashback as flashback
from fedemu.algorithms.methods.flashback import taught as taught
