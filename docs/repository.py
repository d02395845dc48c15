"""Where the site says that its repository is, if OCTAVO_REPO_URL does not: where the checkout came from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any


def web_address(remote: str) -> str | None:
    """The page of a remote such as git@host.org:owner/name.git or https://host.org/owner/name."""
    found = re.fullmatch(
        r"(?:https?://(?:[^/@]+@)?|(?:ssh://)?git@)([\w-]+(?:\.[\w-]+)+)[:/](.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def on_config(config: Any) -> Any:
    """Called by MkDocs once it has read its configuration. A remote that is a folder gives no link."""
    folder = Path(config.config_file_path).parent
    asked = ["git", "-C", str(folder), "remote", "get-url", "origin"]
    if not config.repo_url:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if address := web_address(answer):
            config.repo_url, config.repo_name = address, address.split("/", 3)[3]
    return config
