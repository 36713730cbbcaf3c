{{/* Name of everything: the release's, so that two releases of different names never meet. */}}
{{- define "fthsdp.name" -}}
{{- $name := ternary .Release.Name (printf "%s-operator" .Release.Name) (hasSuffix "operator" .Release.Name) }}
{{- $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "fthsdp.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fthsdp.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "fthsdp.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: fthsdp
{{- end }}

{{- define "fthsdp.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "fthsdp.name" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.create is false: name the account in serviceAccount.name" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "fthsdp.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{/* What the operator may do where it runs jobs. No verb is here that it does not use. */}}
{{- define "fthsdp.rules" -}}
# It deletes a job when its ttlSecondsAfterFinished are over.
- apiGroups: [fthsdp.dev]
  resources: [fthsdpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [fthsdp.dev]
  resources: [fthsdpjobs/status]
  verbs: [patch]
# What it creates names the job as its owner, and keeps the job until it is gone itself.
- apiGroups: [fthsdp.dev]
  resources: [fthsdpjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets, services, serviceaccounts]
  verbs: [get, create]
# Nobody can give a right that he has not: "update" is for the role of each job's coordinator.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, update]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
# For jobs that ask for a disruption budget; one that they do not want any more, or not so, is deleted.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, delete]
{{- $groups := dict "Native" "scheduling.k8s.io" "Volcano" "scheduling.volcano.sh" "Coscheduling" "scheduling.x-k8s.io" }}
{{- range .Values.gang.providers }}
# A group for each attempt of a replica whose job has this provider of gang scheduling.
- apiGroups: [{{ get $groups . }}]
  resources: [podgroups]
  verbs: [create, delete]
{{- end }}
{{- end }}

{{/* What is of no namespace: only where it runs jobs of all of them. Elsewhere it does without. */}}
{{- define "fthsdp.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
