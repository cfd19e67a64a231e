"""The Debian package builds from the sources and holds a module that nginx loads."""
import glob
import os
import shutil
import subprocess

import pytest

from conftest import ROOT


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("dh_nginx"), reason="needs dh_nginx (package nginx-dev)")
def test_the_debian_package_holds_a_module_that_loads(tmp_path):
    tree = tmp_path / "kvgate"
    for folder in ("libprompt", "redis-schemas", "nginx-module"):
        shutil.copytree(os.path.join(ROOT, folder), tree / folder)
    (tree / "tests" / "tools").mkdir(parents=True)
    for file in ("Makefile", "tests/tools/embed_lua.py"):
        shutil.copy(os.path.join(ROOT, file), tree / file)
    os.symlink("nginx-module/debian", tree / "debian")
    done = subprocess.run(["dpkg-buildpackage", "-us", "-uc", "-b", "-d"], cwd=tree, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    package, = glob.glob(str(tmp_path / "libnginx-mod-http-kvgate_*.deb"))
    subprocess.run(["dpkg", "-x", package, tmp_path / "root"], check=True)
    module = tmp_path / "root/usr/lib/nginx/modules/ngx_http_kvgate_module.so"
    load = (tmp_path / "root/usr/share/nginx/modules-available/mod-http-kvgate.conf").read_text()
    assert "load_module modules/ngx_http_kvgate_module.so;" in load
    conf = tmp_path / "nginx.conf"
    conf.write_text(f"load_module {module}; pid {tmp_path}/pid; events {{}} http {{ access_log off; server {{ location / {{ kvgate off; kvgate_status; }} }} }}")
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    done = subprocess.run([nginx, "-t", "-e", "stderr", "-c", conf], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
