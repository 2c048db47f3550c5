"""The functions of trackers that our sinks call, with the parameters that the packages define, and calls checked with them.

CI does not install the packages. The table is of wandb 0.31.0, swanlab 0.10.3 and mlflow 3.17.2.
"name=" has a default. "*" precedes parameters that must be given by name.
"""

from __future__ import annotations

import importlib.machinery
import inspect
from typing import Any

PARAMETERS = {
    "wandb init": "entity= project= dir= id= name= notes= tags= config= config_exclude_keys= config_include_keys="
    " allow_val_change= group= job_type= mode= force= reinit= resume= resume_from= fork_from= save_code= tensorboard="
    " sync_tensorboard= monitor_gym= settings= anonymous=",
    "wandb Run.log": "data step= commit=",
    "wandb Run.finish": "exit_code=",
    "swanlab init": "* reinit= log_dir= mode= workspace= project= public= name= color= description= job_type= group= tags="
    " id= resume= parallel= config= settings= callbacks=",
    "swanlab log": "data step=",
    "swanlab finish": "state= error= async_log_timeout=",
    "mlflow set_tracking_uri": "uri",
    "mlflow set_experiment": "experiment_name= experiment_id= trace_location=",
    "mlflow start_run": "run_id= experiment_id= run_name= nested= parent_run_id= tags= description= log_system_metrics=",
    "mlflow log_params": "params synchronous= run_id=",
    "mlflow log_metrics": "metrics step= synchronous= run_id= timestamp= model_id= dataset=",
    "mlflow end_run": "status=",
    "mlflow MlflowClient": "tracking_uri= registry_uri= workspace_store_uri=",
    "mlflow MlflowClient.get_metric_history": "run_id key",
}
FORMER_NAMES = {"swanlab init": "experiment_name= notes= logdir="}  # taken from **kwargs, which ignore all other names
RETURNED = {"wandb init": "Run.", "mlflow MlflowClient": "MlflowClient."}  # what a call returns: its methods are called


def recorded_signature(function: str) -> inspect.Signature:
    """Of one row of the table, former names included."""
    words = f"{PARAMETERS[function]} {FORMER_NAMES.get(function, '')}".split()
    return inspect.signature(eval(f"lambda {', '.join(f'{w}None' if w.endswith('=') else w for w in words)}: None"))


class Recording:
    """A tracker's module, or an object that it returns, which keeps every call: its name, and its arguments by name.

    Raises TypeError for a call that the package does not accept, and KeyError for a function that is not in the table.
    """

    __spec__ = importlib.machinery.ModuleSpec("recording", None)  # importlib.util.find_spec asks for it

    def __init__(self, package: str, calls: list[tuple[str, dict[str, Any]]], path: str = "", **results: Any) -> None:
        self._package, self._path = package, path
        self._calls, self._results = calls, results

    def __getattr__(self, name: str) -> Any:
        function = f"{self._package} {self._path}{name}"
        signature = recorded_signature(function)

        def call(*arguments: Any, **named: Any) -> Any:
            self._calls.append((f"{self._path}{name}", signature.bind(*arguments, **named).arguments))
            if function in RETURNED:
                return Recording(self._package, self._calls, RETURNED[function], **self._results)
            return self._results.get(name)

        return call
