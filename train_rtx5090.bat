@echo off
rem Trains an image VAE, or the kind of model that the first word names (vae, vocoder, tts), with every optimisation for
rem an RTX 5090 on except CUDA graphs, whose gain is not measured yet. Arguments are passed on and win over the
rem settings here, because the last occurrence of an option counts:
rem   train_rtx5090.bat --data-path DIR --batch-size 8
rem   train_rtx5090.bat vocoder --data-path DIR
rem   train_rtx5090.bat tts --data-path DIR
rem   train_rtx5090.bat -c FILE            the folders and sizes of a configuration file instead of those here
rem voice trains an Uzbek voice with the settings of the profile vits_rtx4090, in its own folders.
setlocal EnableExtensions DisableDelayedExpansion

set "GPUTRAIN=%~dp0.venv\Scripts\gputrain.exe"
if exist "%GPUTRAIN%" goto found
set "GPUTRAIN=gputrain"
where gputrain >nul 2>&1
if "%ERRORLEVEL%"=="0" goto found
>&2 echo train_rtx5090: gputrain is not installed; run setup_windows.bat first
exit /b 2

:found
rem The first word is cut off by hand, because shift does not change %*. There are no quotes, because arguments may hold some.
set ARGUMENTS=%*
if [%1]==[vocoder] goto vocoder
if [%1]==[tts] goto tts
if [%1]==[voice] goto voice
if [%1]==[vae] set ARGUMENTS=%ARGUMENTS:*vae=%
set "MODEL=vae"
set "SETTINGS=--precision bf16 --use-torch-compile --channels-last --persistent-workers"
set "DATA=--data-path ./data/train"
set "SIZES=--output-dir ./outputs/rtx5090_training --config standard"
goto scan

:vocoder
set ARGUMENTS=%ARGUMENTS:*vocoder=%
set "MODEL=vocoder"
rem The precision is the configuration's.
set "SETTINGS=--use-torch-compile --persistent-workers"
set "DATA=--data-path ./data/vocoder"
set "SIZES=--output-dir ./outputs/rtx5090_vocoder --config base_hifi_rtx5090_optimized.yaml"
goto scan

:tts
set ARGUMENTS=%ARGUMENTS:*tts=%
set "MODEL=tts"
set "SETTINGS=--precision mixed --use-torch-compile --channels-last --persistent-workers"
set "DATA=--data-path ./data/tts"
set "SIZES=--output-dir ./outputs/rtx5090_tts --preset high --batch-size 64"
goto scan

:voice
set ARGUMENTS=%ARGUMENTS:*voice=%
set "MODEL=tts"
set "SETTINGS=--precision mixed --use-torch-compile --channels-last --persistent-workers"
set "DATA=--data-path ./data/voice"
set "SIZES=--output-dir ./outputs/rtx5090_voice --config vits_rtx4090"

rem A flag beats the configuration file, so with a file, folders and sizes are left to it.
:scan
if "%~1"=="" goto run
set "WORD=%~1"
set "WORD=%WORD:_=-%"
if "%WORD%"=="--config" set "SIZES="
if "%WORD%"=="-c" set "SIZES="
if not defined SIZES set "DATA="
rem Each `--data-path` or `--data-dir` adds a folder, so the script's own is left out.
if "%WORD%"=="--data-path" set "DATA="
if "%WORD%"=="--data-dir" set "DATA="
shift
goto scan

:run
"%GPUTRAIN%" train-%MODEL% %DATA% %SIZES% %SETTINGS% %ARGUMENTS%
exit /b %ERRORLEVEL%
