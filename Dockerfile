# Two images, both without root and without anything of the machine that builds them:
#
#   docker build --target operator -t fthsdp-operator .     the operator; the coordinator of a job runs in it as well
#   docker build --target trainer  -t fthsdp-trainer  .     PyTorch's image (or yours) with the training library added
#
# TORCH_IMAGE is where your training environment comes from: name your own image there. It needs Python 3.11 or newer with
# pip, torch (2.15 in the tests) and numpy, which are neither installed nor changed here.
#
# A machine that reaches the package index its own way passes two secrets, which stay out of the images:
#   --secret id=pip.conf,src=…  --secret id=certificates,src=…

ARG PYTHON_IMAGE=python:3.12-slim
ARG TORCH_IMAGE=pytorch/pytorch:latest


FROM ${PYTHON_IMAGE} AS build
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python3 -m venv /opt/fthsdp
# The dependencies in a layer of their own, so that a change of the code does not install them again.
COPY pyproject.toml ./
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['operator'], sep='\n')" > requirements.txt \
    && /opt/fthsdp/bin/pip install -r requirements.txt
COPY README.md LICENSE ./
COPY operator operator
COPY trainer_image trainer_image
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    /opt/fthsdp/bin/pip wheel --no-deps --wheel-dir wheels . \
    && /opt/fthsdp/bin/pip install --no-deps --no-index wheels/*.whl


FROM ${PYTHON_IMAGE} AS operator
# kopf asks for the user's name, and a number has none.
ENV PATH=/opt/fthsdp/bin:/usr/local/bin:/usr/bin:/bin USER=fthsdp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /opt/fthsdp /opt/fthsdp
USER 65532:65532
ENTRYPOINT ["fthsdp"]
CMD ["operator"]


FROM ${TORCH_IMAGE} AS trainer
USER 0
COPY --from=build /build/wheels /tmp/wheels
# Some images mark their Python as the distribution's own; an image is nobody's system to break.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_BREAK_SYSTEM_PACKAGES=1 \
    python3 -m pip install --no-cache-dir --disable-pip-version-check /tmp/wheels/*.whl \
    && rm -r /tmp/wheels \
    && echo "fthsdp:x:65532:65532::/home/fthsdp:/usr/sbin/nologin" >> /etc/passwd \
    && mkdir -p /home/fthsdp && chown 65532:65532 /home/fthsdp
# Libraries keep caches in the home folder, and ask who they are.
ENV HOME=/home/fthsdp PYTHONUNBUFFERED=1
USER 65532:65532
