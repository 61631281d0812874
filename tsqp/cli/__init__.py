"""The three programs: `gpu-service`, `tee-runner` and `tsqp`.

Modules here import only click at the top, so that `--help` answers at once; torch and the rest are
imported by the functions that use them.
"""
