"""Benchmarks for airspeed-velocity (benchmarks.py) and scripts to run by hand.

asv imports every module of this folder, with older commits of cupynorm too: at the top of a module, import nothing but
what the commit of the first kernels has (`cupynorm.bench`, `cupynorm.report`), and no other script. It takes functions
called time_…, mem_…, peakmem_… or track_… for benchmarks.
"""
