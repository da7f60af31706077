"""What a lab host with fake V100s carries in ``/usr/local/lib/fake-v100``: the machine and its programs.

Standard library only, Python >= 3.8. :mod:`~.machine` keeps the state and shows it as a kernel would, :mod:`~.smi` answers as
``nvidia-smi``, :mod:`~.tools` as the small programs around a driver, :mod:`~.faults` breaks things.
"""
