"""`--launcher ray`: replicas on other hosts, started by Ray.

Ray finds hosts with room and starts `ringcast serve --headless` there, once for each replica; from
then on they are nodes of the master like any others, and no token goes through Ray.

    master (cli/serve.py)  launcher.py -> ray_driver.py, a process of its own, with Ray in it
    on Ray's nodes         ray_host.py, an actor of Ray -> host_process.py, a process of its own

What doesn't need Ray is in files without it: what is asked for (ask.py), what a headless host is
told (host_options.py), and what is done when one ends or is lost (fleet.py).
"""
