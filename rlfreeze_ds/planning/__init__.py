"""Where and how much to freeze: schedule -> DAG -> costs -> linear program -> plan.

Pure: no torch, deepspeed or ray, and nothing of this package but ``errors``. Import the modules themselves; this file
stays empty so that importing one of them costs no more than that one.
"""
