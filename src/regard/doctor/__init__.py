"""Check the promises of the README on the devices of this machine.

    regard doctor                          on the command line
    regard.doctor.examine_devices()        the same results as an Examination

Next: doctor/examine.py
"""

from regard.doctor.examine import examine_devices
from regard.doctor.examined import Examination, Trial

__all__ = ["Examination", "Trial", "examine_devices"]
