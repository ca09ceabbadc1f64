"""``fedemu.algorithms.fednova``, a former import place. The method is in ``fedemu.algorithms.methods.fednova``."""

from fedemu.algorithms.methods.fednova import AVERAGES as AVERAGES
from fedemu.algorithms.methods.fednova import FedNova as FedNova
from fedemu.algorithms.methods.fednova import NormalisedSGD as NormalisedSGD
from fedemu.algorithms.methods.fednova import Weights as Weights
from fedemu.algorithms.methods.fednova import effective_steps as effective_steps
from fedemu.algorithms.methods.fednova import fednova as fednova
from fedemu.algorithms.methods.fednova import minus_own as minus_own
