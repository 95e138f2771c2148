from perdure.agent.workers import Exit as Ended, Workers as Children, kill_process, set_subreaper, start_process, wait_for
