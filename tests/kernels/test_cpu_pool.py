"""Work goes to the threads of a call by their speeds: a slow one does less."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
# each task sleeps, so that a busy machine changes little; those of thread 1 for twice as long
PROGRAM = """
#include <stdio.h>
#include <string.h>
#define INLINE static inline
#include "pool.h"
static int64_t ran[2];
static void task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)arg;
    for (int64_t i = begin; i < end; i++) usleep(thread ? 4000 : 2000);
    ran[thread] += end - begin;
}
int main(void)
{
    ll_threads(2);
    for (int i = 0; i < 5; i++) pool_run(task, NULL, 60);
    printf("%d %d", (int)ran[0], (int)ran[1]);
    return 0;
}
"""


@pytest.mark.slow
def test_a_thread_of_half_the_speed_does_half_the_work(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "pool.c").write_text(PROGRAM)
    command = [compiler, "-O1", "-std=gnu11", "-pthread", f"-I{KERNELS}", "pool.c", "-o", "pool"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    said = subprocess.run([tmp_path / "pool"], stdout=subprocess.PIPE, check=True, timeout=60)
    fast, slow = map(int, said.stdout.split())
    assert fast + slow == 300 and 60 <= slow <= 125, f"{slow} of 300 tasks, 100 are its share"
